"""Plain values that a user gives: engines' settings, parallel layouts, names of roles."""

"""Plain values given by the user: settings of engines, parallel layouts, names of roles."""

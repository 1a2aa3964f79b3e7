"""Where hosts live: in Ray actors, or inside the kernel."""

"""The commands: they read arguments, call the rooms below, and turn errors into one line and an exit code."""

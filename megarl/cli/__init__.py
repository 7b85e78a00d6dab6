"""The commands: they read arguments, call the packages below, turn errors into one line and an exit code."""

"""The commands: they read arguments, call the packages below, and turn errors into one line and an exit code."""

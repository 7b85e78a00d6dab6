"""Episodes of several turns: tools, environments, agents that talk to an endpoint, and user coroutines.
A run with single-turn responses never imports this package."""

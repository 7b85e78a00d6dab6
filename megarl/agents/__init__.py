"""Multi-turn episodes: tools, environments, agents with an endpoint, and user coroutines.

A run with single-turn responses never imports this package."""

"""Multi-turn episodes: tools, environments, agents with an endpoint, and user coroutines.

Single-turn runs never import this package."""

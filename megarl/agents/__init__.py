"""Multi-turn episodes, which single-turn runs never import."""

"""Engines that generate: one in this process, SGLang beside it, and servers that somebody else runs, behind
one interface (engine.py)."""

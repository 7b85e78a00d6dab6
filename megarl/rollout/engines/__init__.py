"""Rollout engines behind one protocol (base.py): transformers, SGLang, and SGLang servers elsewhere."""

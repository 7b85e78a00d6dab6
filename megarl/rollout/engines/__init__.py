"""Rollout engines (base.py): transformers, SGLang, and external SGLang servers."""

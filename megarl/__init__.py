"""megarl: large-scale reinforcement learning of reasoning language models on Megatron-core and SGLang."""

__version__ = "0.2.0"

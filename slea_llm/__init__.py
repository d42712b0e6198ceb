"""Fine-tuning of multi-turn LLM agents by step-level experience augmented reinforcement learning."""

__version__ = "0.1.0"

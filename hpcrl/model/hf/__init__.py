"""Weights and configs of Hugging Face models, both ways."""

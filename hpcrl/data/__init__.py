"""Rows of data files as prompts, answers and conversations in tokens and pictures, their order, and `hpcrl data`. No
engine and no score (`hpcrl.rewards`)."""

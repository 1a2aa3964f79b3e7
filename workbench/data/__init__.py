"""Data and the user's functions: prompts, demonstrations, pairs, environments, tools, reward functions, verifiers."""

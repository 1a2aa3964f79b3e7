"""Where rows come from: prompts, demonstrations, pairs, environments, reward functions, verifiers."""

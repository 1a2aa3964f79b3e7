"""The maths of RLHF as pure functions of tensors: estimators, losses, KL, aggregation, corrections."""

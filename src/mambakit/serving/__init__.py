"""A server of one model, or of the checkpoints of a run, that speaks as OpenAI's does."""

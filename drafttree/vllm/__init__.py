"""Draft trees in vLLM: a model runner, attention backends and a worker for each kind of device."""

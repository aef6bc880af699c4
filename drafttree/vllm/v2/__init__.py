"""Draft trees on vLLM's V2 model runner: trees stay on the device, and scheduling may be
asynchronous."""

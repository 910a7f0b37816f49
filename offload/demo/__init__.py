"""`python -m offload demo`: real chats with a real model, their KV cache offloaded between turns."""

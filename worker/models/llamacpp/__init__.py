"""The llama.cpp backend: all architectures and devices that llama.cpp knows, one of its sequences for each context."""

"""The OpenAI-compatible server over ``jaxkv.engine``: ``python -m jaxkv.serve`` starts it.

``worker`` owns the engine in a thread of its own; ``app`` has the endpoints; ``read`` turns what a client sends into
requests; ``write`` turns what the engine says into answers; ``guard`` and ``connection`` are what a client meets first.
"""

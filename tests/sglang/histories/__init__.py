"""Replays a trace of real conversations as chats, by retention and size of the pool."""

"""A trace of real conversations replayed as chats, by retention and size of the pool."""

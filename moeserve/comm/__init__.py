"""Communication between ranks: connections, collectives, shared memory, and the vote on steps."""

"""What runs in workers and ranks only: the ranks' program, its engines, what counts their memory, their launcher."""

"""How far predictions lie from what published runs were measured to take, and what that says of a new one."""

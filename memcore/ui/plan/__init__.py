"""The shared plan: each section's fields as widgets of the sidebar, their values, and a scenario's data from them."""

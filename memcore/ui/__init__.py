"""The dashboard: the only part of the project that imports streamlit."""

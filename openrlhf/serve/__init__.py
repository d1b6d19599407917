"""A reward model behind HTTP."""

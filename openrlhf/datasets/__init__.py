"""Data: sources and mixing, rows into token ids and masks, and an order that survives a restart."""

"""Text: names in messages, data files from anyone, tables in HTML."""

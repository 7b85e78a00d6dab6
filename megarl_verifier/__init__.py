"""Final answers of mathematical problems: found in a text, compared with a reference, turned into
integers."""

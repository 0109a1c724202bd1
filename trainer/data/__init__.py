"""From what people bring to one prepared dataset, and from there into batches."""

"""What is done about a bad number, a spike, a skipped update, growing memory and running out of memory."""

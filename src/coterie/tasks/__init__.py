"""What is learnt: data files in, token ids and labels out, loss as a sum, the metrics of the field."""

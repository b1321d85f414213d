"""What a worker is asked to train, as data that crosses the wire: model, trainable parts, optimizer. No torch."""

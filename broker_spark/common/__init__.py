"""What every source and sink uses: options, schema, offsets, topics, files."""

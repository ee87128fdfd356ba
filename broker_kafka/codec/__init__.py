"""What records carry: headers, runs of records, metadata of offsets and groups."""

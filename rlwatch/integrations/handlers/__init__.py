"""What a trainer can be told to do, one file for each command."""

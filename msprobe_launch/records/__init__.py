"""What the recording half and the reading half agree on: names, files, formats. Standard library only."""

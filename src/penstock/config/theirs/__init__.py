"""config.json files of other libraries, read and written without torch."""

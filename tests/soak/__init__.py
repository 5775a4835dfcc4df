"""Many processes at random for minutes, some killed at random; a checker reads afterwards what they wrote down."""

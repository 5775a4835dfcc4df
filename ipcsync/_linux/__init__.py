"""What ipcsync needs of Linux itself: futex words, processes and their deaths, forks, file locks."""

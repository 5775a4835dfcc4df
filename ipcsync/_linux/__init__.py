"""Linux calls that ipcsync makes itself: futexes, processes and their deaths, forks, file locks."""

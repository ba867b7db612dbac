from .doctor import main

main()

from offload_trainer.cli import main

raise SystemExit(main())

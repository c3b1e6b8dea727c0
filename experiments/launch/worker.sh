#!/usr/bin/env bash
# Runs one program at a time on a worker of a TPU slice, detached from the connection.
#
#   bash worker.sh start ID LAUNCH COMMAND   start it, unless the run ID is in progress
#   bash worker.sh follow                    print the log until the program ends
#   bash worker.sh stop                      SIGTERM: training saves a checkpoint
#
# ID names the command, and LAUNCH the launcher that starts it: after `stop` it starts no
# other. The state is in ~/bpd_jax_run, whose file `lock` a running program holds.
# Exit statuses: 75 another program is running; 76 it failed; 77 it was stopped.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
mkdir -p ~/bpd_jax_run && cd ~/bpd_jax_run || exit 1
running() { ! flock --nonblock --shared lock true; }
said() { cat "$1" 2>/dev/null; }

case "${1:-}" in
start)
    exec 9>starting && flock 9 # One start at a time.
    if running; then
        # An earlier connection, or another launcher, has started the same command.
        [ "$(said id)" = "$2" ] && exit 0
        echo "$(hostname): another run is in progress"
        exit 75
    fi
    if [ "$(said stopped)" = "$3" ]; then
        echo "not started: the run was stopped on request"
        exit 77
    fi
    rm -f status stopped pid
    echo "$2" >id
    echo "$3" >launch
    setsid --fork flock --timeout 5 lock bash "$script" run "$4" >log 2>&1 </dev/null 9>&-
    for _ in $(seq 100); do [ -e pid ] && exit 0 || sleep 0.1; done
    exit 1
    ;;
run)
    bash -c "$2" &
    echo $! >pid
    wait $!
    status=$?
    echo "--- the run ended with status $status"
    echo "$status" >status
    ;;
follow)
    [ -e log ] || exit 76
    tail -n 40 --follow log & # The end of an older log is shown again.
    while running; do sleep 0.3; done
    sleep 0.5
    kill $!
    [ "$(said stopped)" = "$(said launch)" ] && exit 77
    [ "$(said status)" = 0 ] || exit 76
    ;;
stop)
    said launch >stopped
    running && kill -TERM "$(said pid)"
    exit 0
    ;;
esac

# `demo --keep` runs until it is interrupted.
# replace: /etc/isthmus/isthmus.yaml => isthmus.yaml
# replace: isthmus demo --keep => kept
kept() {
    command isthmus demo --keep > kept.log &
    until grep -q Ctrl-C kept.log; do sleep 0.1; done
    kill -INT $!
    wait $!
}

// workload is the program of the cluster's containers, including the sandboxes: it prints its environment and waits for
// SIGTERM. It is static, because its image contains nothing else.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
)

func main() {
	env := os.Environ()
	slices.Sort(env)
	for _, e := range env {
		fmt.Println(e)
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
}

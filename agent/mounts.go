package agent

import (
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/mounts"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

// newMounts returns the component that ends the process when the host has deleted a directory that the container mounts.
func (a *Agent) newMounts() *mounts.Watcher {
	return mounts.New(mounts.Options{Dirs: a.hostDirs, StateDir: a.stateDirPath, Note: a.lossNote, Log: a.log.Named("mounts")})
}

// hostDirs returns the directories of the host without which the agent cannot do its job.
func (a *Agent) hostDirs() []string {
	c := a.pluginConfig.Load()
	dirs := []string{filepath.Join(c.KubeletDir, nodelock.Directory), filepath.Join(c.KubeletDir, "pod-resources")}
	claims := a.dra.Dirs()
	dirs = append(dirs, claims...)
	if len(claims) > 0 || c.Enabled && c.UsesCDI() {
		dirs = append(dirs, c.CDI.Dirs()...)
	}
	if dir := a.stateDirPath(); dir != "" {
		dirs = append(dirs, dir)
	}
	return dirs
}

// stateDirPath returns the state directory, empty if nothing is kept.
func (a *Agent) stateDirPath() string { return a.stateDir.Status().Path }

// lossNote returns the path of the note that the state directory is lost, empty if there is no place for it.
func (a *Agent) lossNote() string {
	if socket := a.healthConfig.Load().Socket; socket != "" {
		return filepath.Join(filepath.Dir(socket), mounts.NoteName)
	}
	return ""
}

// readLoss reads whether an earlier process has lost the state directory.
func (a *Agent) readLoss() {
	loss, err := mounts.ReadLoss(a.lossNote(), time.Now())
	if err != nil {
		a.log.Warn("cannot tell whether the saved findings were lost", zap.Error(err))
	}
	if a.loss = loss; loss != nil {
		a.log.Warn("saved findings were lost", zap.String("flag", "--state-dir"), zap.Stringer("reason", loss))
		a.served.Store(new([]byte("true"))) // a device plugin may have served
	}
}

// lossText describes the loss of the state directory, empty if it is not lost.
func (a *Agent) lossText() string {
	if a.loss == nil || a.loss.Expired(time.Now()) {
		return ""
	}
	return a.loss.String()
}

// lossEvent returns the event of the node about the loss of the state directory, nil if it is not lost.
func (a *Agent) lossEvent() *kube.NodeEvent {
	if a.loss == nil {
		return nil
	}
	return &kube.NodeEvent{Reason: "GPUStateLost", Message: "--state-dir: " + a.loss.String(), At: a.loss.At}
}

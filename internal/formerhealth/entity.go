package formerhealth

// EntityKind is the kind of an Entity.
type EntityKind uint8

// The kinds of entities that a source measures beside the devices.
const (
	EntityNVSwitch   EntityKind = iota
	EntitySwitchLink            // a port of an NVSwitch
	EntityGPULink               // an NVLink of a GPU
	EntityCPU
	EntityCPUCore
)

// Entity is hardware that the source measures beside the devices. It is measured for metrics only: it has no health.
type Entity struct {
	Kind   EntityKind
	ID     uint     // DCGM's number; of a link its number in the NVSwitch or GPU
	Parent uint     // DCGM's number of a link's NVSwitch or GPU, or of a core's CPU
	GPU    DeviceID // of an EntityGPULink; "" if the GPU is not listed

	Values map[Field]float64 // a blank is absent, never 0; not modified once returned
	Texts  map[Field]string  // the same for fields with a text
}

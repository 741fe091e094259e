# shellcheck shell=bash disable=SC2034
# The settings of a site, for all job scripts in this folder.  On the first node of a job, Bash reads the first of these
# files that exists: the one that PDGEMM_SITE names (sbatch --export=ALL,PDGEMM_SITE=/path/to/this-machine.sh ...), then
# ~/.config/pdgemm/site.sh, then the one next to the scripts.  Copy it to ~/.config/pdgemm and edit the copy, which no
# update of pdgemm changes.
# If a required setting is missing, a job ends at once, with exit code 2 and a line that names the setting.
#
# Give partition, account and quality of service on sbatch's command line (-p, -A, -q), or once for your shell, as
# SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_QOS.  Both override the #SBATCH lines of the scripts.

# ---------------------------------------------------------------- programs
# Modules, in the order in which they are loaded: compiler, the MPI that mpi4py uses, CUDA.  All others are unloaded
# first, because a job inherits the modules of the shell that submits it.  Empty: modules are not changed.
PDGEMM_MODULES=''

# Required.  The environment in which pdgemm is installed (venv or conda): the folder with bin/python.  All nodes must
# see it.  For thousands of ranks put it on a file system that is fast for many readers; home folders seldom are.
PDGEMM_VENV=''

# ---------------------------------------------------------------- ranks
# Required.  The command that starts ranks; {ranks} is replaced by their number.  Words are separated by blanks, without
# quotes.  Launcher and MPI must use the same protocol; otherwise N processes start that each see one rank.  A job
# checks that before it begins.  `srun --mpi=list` lists the protocols of this Slurm.
#
#   srun --mpi=pmix -n {ranks}           Open MPI built with PMIx; or pmix_v4 and the like, if there are several
#   srun --mpi=pmi2 -n {ranks}           MPICH, MVAPICH; Intel MPI with I_MPI_PMI_LIBRARY=/path/to/libpmi2.so
#   srun --mpi=cray_shasta -n {ranks}    Cray's MPICH
#   mpirun -n {ranks}                    an MPI with its own launcher: the wheels of PyPI, Intel MPI.  Open MPI's mpirun
#                                        binds each rank to one core; for 8 threads: mpirun --map-by slot:PE=8 ...
#   mpiexec -n {ranks}                   PBS: Cray's PALS, Intel MPI, MPICH.  An MPI that was built without PBS or LSF
#                                        does not know the nodes: mpirun --hostfile $PBS_NODEFILE -n {ranks}, or
#                                        $LSB_DJOB_HOSTFILE (in double quotes here)
#   jsrun -n {ranks} -a 1 -c 4           LSF with IBM Spectrum MPI; -c is the number of cores of a rank
PDGEMM_LAUNCH=''

# The same for gpus.sbatch, if it differs.  Every rank should see all GPUs of its node: pdgemm uses one by the rank's
# number on the node, and reads the memory of the others by CUDA IPC, which works only between GPUs that the rank sees.
# So use neither --gpus-per-task=1 nor --gpu-bind=single:1, unless the site requires it (panels are then sent by NCCL or
# MPI).  If Slurm binds GPUs by default: srun --mpi=pmix --gpu-bind=none -n {ranks}
PDGEMM_GPU_LAUNCH=''

# Threads of BLAS per rank, as given to sbatch.  Empty: the rank's share of the cores on which it may run.
PDGEMM_THREADS=${SLURM_CPUS_PER_TASK-}

# ---------------------------------------------------------------- network
# Open MPI through UCX, on InfiniBand.
#export OMPI_MCA_pml=ucx
# Open MPI over TCP (Ethernet): with these settings a message is sent when it is posted, and its arrival is reported at
# once, not after the messages that follow it.
#export OMPI_MCA_btl_tcp_flags=send,inplace OMPI_MCA_pml_ob1_send_pipeline_depth=1000
#export OMPI_MCA_btl_tcp_eager_limit=8388608 OMPI_MCA_btl_tcp_rndv_eager_limit=8388608
#export OMPI_MCA_btl_tcp_max_send_size=8388608
# The network port, if a node has several: one may serve storage only.  `ucx_info -d` lists them.
#export UCX_NET_DEVICES=mlx5_0:1
# Set this only if UCX chooses badly: it disables all transports that are not in the list.  Without cuda_copy and
# cuda_ipc, UCX treats pointers to GPU memory as pointers to host memory.
#export UCX_TLS=rc,sm,self,cuda_copy,cuda_ipc

# ---------------------------------------------------------------- GPUs
# GPU-aware MPI.  Cray MPICH needs the first setting.  pdgemm finds out by itself; the second overrides it (yes or no).
#export MPICH_GPU_SUPPORT_ENABLED=1
#export PDGEMM_GPU_AWARE=no
# NCCL connects its ranks by TCP: name the interface of the network between nodes, not of the management network.
#export NCCL_SOCKET_IFNAME=ib0
#export NCCL_IB_HCA=mlx5
#export NCCL_DEBUG=WARN

# ---------------------------------------------------------------- files
# Lustre: the number of storage targets over which new files in the folder of C are striped (-1: all).  One target
# writes some GB/s, for any number of ranks.  It is set for the folder, because C is written under another name and then
# renamed.
PDGEMM_STRIPES=''
# File systems without locks (Lustre mounted without flock): HDF5 fails to open files there without this setting:
#export HDF5_USE_FILE_LOCKING=FALSE
